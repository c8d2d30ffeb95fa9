"""The process on its host: service manager, self-protection. Knows nothing of Kubernetes."""
