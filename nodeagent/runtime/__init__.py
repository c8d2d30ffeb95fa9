"""Code for this process: wake-ups, threads, sd_notify, own cost, self-protection, files, the lock of the node."""
