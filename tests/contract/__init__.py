"""The contract tests check what users may rely on, only through commands and files.

They never import the package. A rewrite of the package has to pass these tests unchanged, since an edit to a test
changes a promise to users.
"""
