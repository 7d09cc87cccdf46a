# Stands for python:3.11-slim-bookworm where no registry can be reached: the base of operator/Dockerfile.
ARG BASE
FROM ${BASE}
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates python3.11 python3.11-venv python3-pip \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
ENV LANG=C.UTF-8
