# CPU image: the environment of `make setup`, DeepSpeed's CPU ops built ahead of time.
# Not built by our tests (they run without a container engine); the same commands run in them outside one.
#
#   docker build -f docker/cpu.Dockerfile -t megatron-port:cpu .
#   docker run --rm --shm-size=1g megatron-port:cpu make quickstart
#
# DeepSpeed compiles with -march=native: run the image on the kind of processor that built it.
FROM debian:13-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV DEBIAN_FRONTEND=noninteractive TORCH_INDEX=${TORCH_INDEX} DEVICE=cpu
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make g++ python3-dev python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron-port
# What the environment depends on, first: a change of the sources alone keeps this layer.
COPY Makefile pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY scripts scripts
RUN mkdir -p megatron_port && touch megatron_port/__init__.py && make setup
COPY . .
RUN make setup
ENV PATH=/opt/megatron-port/.venv/bin:${PATH}
CMD ["megatron-port", "doctor"]
