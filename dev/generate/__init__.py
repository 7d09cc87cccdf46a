"""Writes every file of the checkout that follows from another one."""
