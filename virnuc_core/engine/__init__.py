"""The async packing core: shards, packing, loader, runner, worker, pool."""
