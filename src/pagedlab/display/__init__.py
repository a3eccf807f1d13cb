"""Pictures of a trace for notebooks: block tables, index tables, the pool, the timeline. Needs no torch."""
