# A server of exact speculative decoding on CPUs (docs/deploy.md):
#     docker build -t foretoken . && docker run -p 127.0.0.1:8000:8000 -v foretoken:/cache foretoken
FROM python:3.11-slim
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE /src/
COPY src /src/src
# torch from its own index, where Linux wheels without CUDA are; what it needs, in the versions that are tested, from PyPI.
# The image has no C++ compiler: building foretoken fetches one from PyPI, which is not left in it
RUN pip install --no-cache-dir --constraint /src/constraints.txt torch --extra-index-url https://download.pytorch.org/whl/cpu \
 && pip install --no-cache-dir --constraint /src/constraints.txt "/src[serve]" \
 && useradd --create-home foretoken && mkdir /cache && chown foretoken /cache
USER foretoken
ENV XDG_CACHE_HOME=/cache
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["foretoken", "serve", "--host", "0.0.0.0"]
