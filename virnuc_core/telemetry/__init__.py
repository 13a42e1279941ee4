"""What a run measures: samples, stage clock, batches, progress, operations."""
