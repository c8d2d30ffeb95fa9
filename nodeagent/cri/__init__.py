"""The container runtime's socket: a client of the few calls of the CRI (runtime.v1) that images need."""
