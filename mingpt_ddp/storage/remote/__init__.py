"""Read and write files in object stores and on other remote filesystems."""
