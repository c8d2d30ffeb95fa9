"""Disk usage of pods: paths, walks, quotas, deleted files, write rates."""
