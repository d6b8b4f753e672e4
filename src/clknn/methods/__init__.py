"""The other systems of the paper's table, one file each."""
