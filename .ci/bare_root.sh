# shellcheck shell=bash
# Bare Debian 12 roots, for the scripts beside this file. To be sourced; needs root and debootstrap.
#
#   bare_root FOLDER        makes one: no compiler; mirrors, proxies and certificates as this machine has them.
#                           BARE_ROOT_BASE names a folder where debootstrap's work is kept for the next one
#   enter FOLDER COMMAND…   runs a command in it, with an environment of its own and an empty input
#   share_ccache FOLDER     where CCACHE_DIR is set and this machine has ccache, the root gets it too: objects of the
#                           checkout at FOLDER/lockstep come from there. Prints the variables for it, KEY=VALUE words
#   leave FOLDER            takes its mounts away
#   take_away FOLDER        removes it with all that was made in it, and nothing that is mounted there

bare_root() {
  local root=$1 base=${BARE_ROOT_BASE:-}
  if [[ -z $base ]]; then
    debian "$root" || return 1
  else
    if [[ ! -e $base.complete ]]; then
      take_away "$base" || return 1  # what an earlier run has left, when it was stopped
      debian "$base" || return 1
      : >"$base.complete"
    fi
    mkdir -p "$root" && cp -a "$base/." "$root" || return 1
  fi
  mount_places "$root"
}

debian() {  # debian FOLDER: what debootstrap makes, and the way to the mirrors as this machine has it; no packages
  local root=$1 mirror=''
  mkdir -p "$root"
  chmod 755 "$root"  # mktemp's folders are closed to users without root
  # shellcheck disable=SC2016  # $(SITE) is apt's own word
  ! grep -qsx 'ID=debian' /etc/os-release ||
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | grep -m1 -v security || true)
  debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "${mirror:-http://deb.debian.org/debian}" \
    >"$root.debootstrap.log" 2>&1 || { tail -20 "$root.debootstrap.log" >&2; return 1; }
  rm -f "$root.debootstrap.log"
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  [[ ! -d /etc/apt/apt.conf.d ]] || cp -r /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/"
  [[ ! -e /etc/pip.conf ]] || cp /etc/pip.conf "$root/etc/pip.conf"
  cp --remove-destination -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
}

mount_places() {
  local place
  for place in proc sys dev; do
    mkdir -p "$1/$place" && mount --rbind "/$place" "$1/$place" && mount --make-rslave "$1/$place" || return 1
  done
}

enter() {
  local root=$1 name given=()
  shift
  for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [[ -z ${!name:-} ]] || given+=("$name=${!name}")
  done
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8 "${given[@]}" chroot "$root" "$@" </dev/null
}

share_ccache() {
  [[ -d ${CCACHE_DIR:-} ]] && command -v ccache >/dev/null || return 0
  enter "$1" sh -c 'apt-get update && apt-get install -y --no-install-recommends ccache' >/dev/null 2>&1 || return 0
  mkdir -p "$1/ccache"
  mount --bind "$CCACHE_DIR" "$1/ccache" || return 0
  printf '%s ' CCACHE_DIR=/ccache CCACHE_BASEDIR=/lockstep CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE="${CCACHE_MAXSIZE:-5G}" \
    CCACHE_SLOPPINESS=pch_defines,time_macros CMAKE_CXX_COMPILER_LAUNCHER=ccache
}

leave() {  # lazily: what a process still has open goes when it ends
  local place
  for place in ccache proc sys dev; do ! mountpoint -q "$1/$place" || umount -l "$1/$place" || return 1; done
}

take_away() {
  leave "$1" || return 1
  # A bind mount of the same disk is the same file system to rm: what is mounted still must not be entered.
  ! grep -qF " $(realpath -m -- "$1")/" /proc/self/mountinfo || { printf 'still mounted: %s\n' "$1" >&2; return 1; }
  rm -rf --one-file-system -- "$1"
}
