# shellcheck shell=bash
# Bare Debian 12 roots, for the scripts beside this file. To be sourced; needs root and debootstrap.
#
#   bare_root FOLDER        makes one: no compiler; mirrors, proxies and certificates as this machine has them.
#                           BARE_ROOT_BASE names a folder where debootstrap's work is kept for the next one
#   enter FOLDER COMMAND…   runs a command in it, with an environment of its own
#   share_ccache FOLDER     where CCACHE_DIR is set and this machine has ccache, the root gets it too: objects of the
#                           checkout at FOLDER/lockstep come from there. Prints the variables for it, KEY=VALUE words
#   leave FOLDER            takes its mounts away

bare_root() {
  local root=$1 base=${BARE_ROOT_BASE:-} mirror
  if [[ -n $base ]]; then
    if [[ ! -e $base.complete ]]; then
      BARE_ROOT_BASE='' bare_root "$base" || return 1
      leave "$base"
      : >"$base.complete"
    fi
    mkdir -p "$root"
    cp -a "$base/." "$root"
    mount_places "$root"
    return
  fi
  mkdir -p "$root"
  chmod 755 "$root"  # mktemp's folders are closed to users without root
  mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | grep -m1 -v security || true)
  debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "${mirror:-http://deb.debian.org/debian}" \
    >"$root.debootstrap.log" 2>&1 || { tail -20 "$root.debootstrap.log" >&2; return 1; }
  rm -f "$root.debootstrap.log"
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  # The way to the mirrors as this machine has it: proxies and certificates, no packages.
  cp -r /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/"
  [[ ! -e /etc/pip.conf ]] || cp /etc/pip.conf "$root/etc/pip.conf"
  cp --remove-destination -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  mount_places "$root"
}

mount_places() {
  local place
  for place in proc sys dev; do
    mkdir -p "$1/$place"
    mount --rbind "/$place" "$1/$place"
    mount --make-rslave "$1/$place"
  done
}

enter() {
  local root=$1
  shift
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8 chroot "$root" "$@"
}

share_ccache() {
  [[ -n ${CCACHE_DIR:-} ]] && command -v ccache >/dev/null || return 0
  enter "$1" sh -c 'apt-get update && apt-get install -y --no-install-recommends ccache' >/dev/null 2>&1 || return 0
  mkdir -p "$1/ccache"
  mount --bind "$CCACHE_DIR" "$1/ccache"
  printf '%s ' CCACHE_DIR=/ccache CCACHE_BASEDIR=/lockstep CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE="${CCACHE_MAXSIZE:-5G}" \
    CCACHE_SLOPPINESS=pch_defines,time_macros CMAKE_CXX_COMPILER_LAUNCHER=ccache
}

leave() {
  local place
  ! mountpoint -q "$1/ccache" || umount "$1/ccache"
  for place in proc sys dev; do ! mountpoint -q "$1/$place" || umount -l "$1/$place"; done
}
