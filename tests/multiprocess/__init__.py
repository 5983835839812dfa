"""Tests on several ranks. It is a package so that an installed `multiprocess` cannot shadow it."""
