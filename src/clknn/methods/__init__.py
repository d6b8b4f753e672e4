"""The other systems of the literature, one file each: a representation or a combiner, and how it learns."""
