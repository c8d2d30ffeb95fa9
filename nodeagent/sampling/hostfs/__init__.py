"""Files and cgroups of the host below an injected root."""
