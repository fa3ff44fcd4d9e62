# CPU image: the environment of `make setup`, with DeepSpeed's ops and our own kernels built ahead of time.
#
#   docker build -f docker/cpu.Dockerfile -t megatron-port:cpu .
#   docker run --rm --shm-size=1g megatron-port:cpu make quickstart
#
# No container engine was at hand: the steps of this file were run by scripts/docker_steps.py in a clean Debian 13
# (docs/ahead-of-time.md). DeepSpeed compiles with -march=native: run the image on the kind of processor that built it.
FROM debian:13.1-slim
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 DEVICE=cpu \
    TORCH_VERSION=${TORCH_VERSION} TORCH_INDEX=${TORCH_INDEX}
# Versions of Debian's packages are not pinned: its mirrors keep only the newest of a release.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make g++ python3-dev python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron-port
# What the slow phases depend on, first: a change of the sources alone keeps this layer.
COPY constraints constraints
COPY scripts/setup.py scripts/setup_cuda.py scripts/setup_hashes.py scripts/setup_machine.py scripts/setup_ops.py scripts/
RUN python3 scripts/setup.py --device cpu --torch-version "${TORCH_VERSION}" --torch-index "${TORCH_INDEX}" \
    --until deepspeed
ENV PATH=/opt/megatron-port/.venv/bin:${PATH}
COPY . .
# The image is not made if a run would build something, or fall back to something slower.
RUN make setup DEVICE=cpu \
 && make kernels DEVICE=cpu KERNELS=cpu \
 && megatron-port doctor --strict --device cpu --set engine=deepspeed \
 && megatron-port doctor --strict --device cpu
CMD ["megatron-port", "doctor", "--strict"]
