"""Read and write files on disks and in object stores, lock them, and manage the run directory."""
