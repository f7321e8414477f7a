"""Read and write the files of a folder of unknown origin: no links, no unnoticed damage."""
