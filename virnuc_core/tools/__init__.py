"""Tools that measure the engine: tune, trace, overhead, ceiling, precision; and rescore."""
