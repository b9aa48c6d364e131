"""``python -m pagemesh.cli`` is ``pagemesh``."""

from pagemesh.cli.main import main

if __name__ == "__main__":
    main()
