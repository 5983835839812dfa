"""The contract: what users may rely on, tested through commands and files alone; the package is never imported.
A rewrite of the package has to pass these tests unchanged: an edit changes what users were promised.
"""
