"""Files of ChecksumWriter and ChecksumReader: on disks that fail, damaged, made by someone else."""
