"""The contract: what users may rely on, tested through commands and files alone; nothing of the package is imported.
A rebuild of the package has to pass these tests as they are: whoever edits them changes what users were promised.
"""
