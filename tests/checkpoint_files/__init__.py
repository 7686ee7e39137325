"""Tests of the files of ChecksumWriter and ChecksumReader: failing disks, damage, forgeries."""
