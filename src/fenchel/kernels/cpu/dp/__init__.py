"""Dynamic programs: chains, alignments, graphs."""
