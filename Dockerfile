# One image for every role: docker run pscluster ps|worker|coordinator ...
# Two stages, so that neither the sources nor the build backend stay in the image. No BuildKit needed.

FROM python:3.12-slim AS build
RUN pip install --no-cache-dir "hatchling>=1.27"
WORKDIR /src
COPY pyproject.toml ./
# A separate file, so that the layer of the dependencies is rebuilt when they change, not when a linter's rule does.
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > /requirements.txt
COPY README.md LICENSE ./
COPY proto proto
COPY core core
COPY ps ps
COPY worker worker
COPY coordinator coordinator
COPY launch launch
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .
COPY examples examples
# Readable for the user below whatever the umask of the checkout was.
RUN chmod -R a+rX,go-w examples

FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PSCLUSTER_STATE_DIR=/var/lib/pscluster
# /run/pscluster holds the cluster token and the certificates, /var/lib/pscluster what parameter servers restore. A new
# named volume mounted there takes over owner and mode.
RUN useradd --system --uid 10001 --user-group --home-dir /app --shell /usr/sbin/nologin pscluster \
 && install --directory --owner=pscluster --group=pscluster --mode=0700 /run/pscluster /var/lib/pscluster
COPY --from=build /requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --root-user-action=ignore --requirement /tmp/requirements.txt
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --root-user-action=ignore --no-deps /tmp/wheels/*.whl
WORKDIR /app
COPY --from=build /src/examples examples
USER pscluster
EXPOSE 2222
ENTRYPOINT ["pscluster"]
CMD ["--help"]
