# VAPO on CUDA GPUs, with vLLM. The commit is recorded with every run:
#   docker build -t vapo --build-arg COMMIT="$(git rev-parse HEAD)" .
#   docker run --gpus all --shm-size 8g -v "$PWD/runs:/app/runs" -v "$PWD/mlruns:/app/mlruns" \
#     vapo fit --config conf/vapo.yaml
# The mounted folders must be writable by user id 10001. docs/scaling.md says how to pin the image.
ARG CUDA_IMAGE=nvidia/cuda:12.8.1-runtime-ubuntu24.04
FROM ${CUDA_IMAGE}

ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates git gpg-agent software-properties-common \
    && add-apt-repository -y ppa:deadsnakes/ppa \
    && apt-get install -y --no-install-recommends python3.11 python3.11-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 vapo \
    && mkdir -p /app/runs /app/mlruns \
    && chown -R vapo:vapo /app
USER vapo
WORKDIR /app

ENV PATH=/app/.venv/bin:${PATH} \
    PYTHONUNBUFFERED=1

# torch's wheels carry the CUDA libraries they were built with; the image gives the rest.
COPY --chown=vapo:vapo pyproject.toml setup.py constraints.txt README.md ./
COPY --chown=vapo:vapo conf/ conf/
COPY --chown=vapo:vapo models/ models/
COPY --chown=vapo:vapo vapo/ vapo/
ARG EXTRAS=vllm,lora,reasoning,gguf
# vLLM wants older ones of these packages than are tested without it.
RUN python3.11 -m venv .venv \
    && grep -vE '^(fastapi|numpy|setuptools|starlette)==' constraints.txt > vllm-constraints.txt \
    && pip install --no-cache-dir -c vllm-constraints.txt ".[${EXTRAS}]"

ARG COMMIT=""
ENV VAPO_COMMIT=${COMMIT}
LABEL org.opencontainers.image.revision=${COMMIT}

ENTRYPOINT ["vapo"]
CMD ["--help"]
