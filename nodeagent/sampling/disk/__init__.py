"""Who holds the disk: file systems, walks, and what of it belongs to which pod."""
