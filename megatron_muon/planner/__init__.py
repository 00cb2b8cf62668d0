"""What a run will own, move and store, from names and shapes alone: the ``plan`` command."""
