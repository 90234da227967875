"""The studies, one module per figure or table of a paper; importing a module registers its study."""
