"""The sanitizer behind `surefoot audit`: watches any PyTorch loop and says what is wrong in it.

Works on loops that never heard of surefoot. Never changes a number of theirs.
"""
