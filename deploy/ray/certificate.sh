#!/usr/bin/env bash
# Makes tls/node.pem and tls/node.key from the authority in the folder tls.
#
#   certificate.sh HOST...       addresses and names of the machines that will show it
#
# Ray's processes call one another by address, so its certificates carry addresses; Baton's carry the name `baton`.
set -euo pipefail
umask 077
[ $# -gt 0 ] || { echo "error: certificate.sh HOST...: name the addresses of the machine" >&2; exit 2; }
names="DNS:baton,DNS:localhost,IP:127.0.0.1"
for host in "$@"; do
  case "$host" in
    *[!0-9.:a-fA-F]*) names="$names,DNS:$host" ;;
    *.*.*.* | *:*) names="$names,IP:$host" ;;
    *) names="$names,DNS:$host" ;;
  esac
done
request=$(mktemp)
extensions=$(mktemp)
trap 'rm -f "$request" "$extensions"' EXIT
echo "subjectAltName=$names" > "$extensions"
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=baton" -keyout tls/node.key -out "$request" \
  2>/dev/null
openssl x509 -req -in "$request" -CA tls/ca.pem -CAkey tls/ca.key -days 365 -extfile "$extensions" -out tls/node.pem \
  2>/dev/null
