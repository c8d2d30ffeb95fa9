"""This process: clocks, wake-ups, threads, sd_notify, own cost, self-protection."""
