"""`python -m nodeagent`."""

import sys

from nodeagent.commands import cli

if __name__ == "__main__":
    sys.exit(cli.main())
