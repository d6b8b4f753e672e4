"""The other systems of the literature, one file each."""
