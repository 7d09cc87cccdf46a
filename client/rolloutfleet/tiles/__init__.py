"""Copies and digests of many blocks of tensors at memory speed: Triton on GPUs, torch on CPUs, equal results.

A table is made once from tensors and blocks (:mod:`rolloutfleet.layout.blocks`) and run for every refit, while the tensors stay where
they are. Loads torch, so nothing imports it before tensors are about to move.
"""
