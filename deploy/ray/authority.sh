#!/usr/bin/env bash
# Makes what a cluster's machines know one another by, in the folder tls: an authority and a token, for this cluster and
# nothing else.
#
#   deploy/ray/authority.sh                 once, where `ray up` is said
#   deploy/ray/authority.sh HOST...         and one certificate for the machines with these addresses or names
#
# Where addresses are not known before, as in a cloud, each machine makes its own certificate: certificate.sh.
set -euo pipefail
umask 077
mkdir -p tls
if [ ! -e tls/ca.key ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=Baton cluster" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout tls/ca.key -out tls/ca.pem 2>/dev/null
fi
[ -e tls/ray-token ] || openssl rand -hex 32 > tls/ray-token
if [ $# -gt 0 ]; then
  bash "$(dirname "$0")/certificate.sh" "$@"
fi
