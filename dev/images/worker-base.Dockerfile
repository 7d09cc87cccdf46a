# Stands for vLLM's own image on a machine without GPUs: the base of worker_image/Dockerfile.
# Python 3.11 and the shared libraries that torch and vLLM load; vLLM itself is mounted at /opt/vllm by the local cluster.
ARG BASE
FROM ${BASE}
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates python3.11 python3-pip \
        libbz2-1.0 libffi8 libgcc-s1 libgomp1 liblzma5 libnuma1 libsqlite3-0 libssl3 libstdc++6 zlib1g \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
ENV LANG=C.UTF-8 PATH=/opt/vllm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
