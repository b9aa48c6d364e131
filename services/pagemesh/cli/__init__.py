"""The ``pagemesh`` command."""
