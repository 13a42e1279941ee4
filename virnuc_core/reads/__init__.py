"""Files of reads to open frames: parse, chunk, translate, store."""
