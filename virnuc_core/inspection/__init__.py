"""What a run would see in some files of reads, without a model: `virnuc inspect`."""
