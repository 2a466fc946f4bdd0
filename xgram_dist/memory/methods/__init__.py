"""One file a method: what stands in a block, and what it makes of the vectors its tokens retrieve."""
