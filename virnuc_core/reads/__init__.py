"""Turn files of reads into a store of open reading frames: parse, chunk, translate, store."""
