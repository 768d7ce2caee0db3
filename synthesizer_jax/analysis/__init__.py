"""Looking at models: attention maps, and comparisons of variants."""
