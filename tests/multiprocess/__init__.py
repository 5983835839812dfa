"""Tests on several ranks. (A package, so that an installed one of this name cannot shadow it.)"""
