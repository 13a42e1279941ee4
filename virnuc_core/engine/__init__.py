"""The async packing core: shards, packing, loader, worker, pool."""
