"""Wake-ups: PSI, memcg and cgroup events, the process connector."""
