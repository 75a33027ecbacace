# vapo on NVIDIA GPUs, with vLLM. docs/gpu_host.md has what the host needs: a driver of the branch
# 580 or newer and NVIDIA's container toolkit. Build the image, check it, train:
#   docker build -t vapo_image --build-arg COMMIT="$(git rev-parse HEAD)" .
#   docker run --rm --gpus all -v vapo_cache:/cache vapo_image doctor --engine vllm
#   docker run --rm --gpus all --shm-size 8g -v vapo_cache:/cache \
#     -v "$PWD/runs:/app/runs" -v "$PWD/mlruns:/app/mlruns" vapo_image fit --config conf/vapo.yaml
# The volume vapo_cache keeps models from the hub and compiled kernels. runs/ and mlruns/ must be
# writable by the user id 10001.
ARG BASE=debian:12-slim
FROM ${BASE}

# Triton, torch and vLLM compile at run time, with a compiler and Python's headers.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 vapo \
    && install -d -o vapo -g vapo /app /app/runs /app/mlruns /cache
USER vapo
WORKDIR /app

# NVIDIA's variables tell the container toolkit which of the driver's files the container needs.
ENV PATH=/app/.venv/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

COPY --chown=vapo:vapo pyproject.toml setup.py constraints.txt README.md ./
COPY --chown=vapo:vapo conf/ conf/
COPY --chown=vapo:vapo models/ models/
COPY --chown=vapo:vapo vapo/ vapo/
# torch's wheels bring the CUDA libraries that they were built for. vLLM wants older ones of four
# packages than are tested without it.
ARG EXTRAS=vllm,lora,reasoning,gguf,math-verify
RUN python3 -m venv .venv \
    && grep -vE '^(fastapi|numpy|setuptools|starlette)==' constraints.txt > vllm-constraints.txt \
    && pip install --no-cache-dir -c vllm-constraints.txt ".[${EXTRAS}]"
RUN vapo doctor

# With an older driver than 580 NVIDIA's container toolkit does not start the container.
ENV NVIDIA_REQUIRE_CUDA="cuda>=13.0"

# Recorded with every run.
ARG COMMIT=""
ENV VAPO_COMMIT=${COMMIT}
LABEL org.opencontainers.image.revision=${COMMIT}

ENTRYPOINT ["vapo"]
CMD ["--help"]
