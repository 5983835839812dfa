"""Tests on several ranks. (A package, so that no installed one of this name can stand before it.)"""
