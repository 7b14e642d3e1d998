"""The program that a sandbox's fresh Python runs; see `code` for what it is.

  supervisor (kills everything below it)
    judge: in namespaces of its own, process 1 there; gets the tests
      solution: an unprivileged user under limits; never sees the tests

Every isolation is tried, and the ones that the kernel grants are reported:
a container without the right to make namespaces still has the user, the limits
and the supervisor. Standard library only; this file is run by its path.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys

sys.path.insert(0, os.path.abspath(os.path.join(__file__, '../../..')))
from gdpo_jax.rewards import exchange, trial, workers

del sys.path[0]  # nothing else of what lies there is the solution's business

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWIPC = 0x00020000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND = 2, 4, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_SETUP_TIMEOUT_S = 20.0
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
# Users that exist nowhere; systemd allots dynamic users from the same range.
# One per run, so that the limit on processes counts this run's alone.
_FIRST_UID, _NUM_UIDS = 61184, 4336
_SYSTEM = ('/usr', '/bin', '/lib', '/lib32', '/lib64', '/etc/ld.so.cache')
_DEVICES = ('/dev/null', '/dev/zero', '/dev/random', '/dev/urandom')


def main():
  sock = socket.socket(fileno=int(sys.argv[1]))
  spec = json.loads(workers.receive(sock))
  sys.path.extend(spec['path'])
  workers.become_subreaper()
  granted = enter_namespaces()
  judge = os.fork()  # of a fresh Python with one thread
  if judge:
    sock.close()
    workers.supervise(judge)
  os.setsid()
  os.umask(0o022)
  _make_first_to_go()
  if 'files' in granted:
    try:
      enter_root(spec)
    except OSError:
      granted.remove('files')
  os.chdir(spec['scratch'])
  started = {'granted': granted}
  if os.getuid() == 0:
    spec['uid'] = _FIRST_UID + int.from_bytes(os.urandom(4)) % _NUM_UIDS
    os.chown(spec['scratch'], spec['uid'], spec['uid'])
    granted.append('user')
    if not _anybody_reaches(os.__file__):
      started['problem'] = (
        'the sandbox has no file tree of its own here, and its unprivileged '
        f'user cannot read Python in {os.path.dirname(os.__file__)}'
      )
  solution, ours = start_solution(sock, spec)
  try:
    ours.settimeout(_SETUP_TIMEOUT_S)
    workers.receive(ours)
    ours.settimeout(None)
  except (OSError, EOFError) as error:
    started['problem'] = f'the solution has no process: {error}'
  # The tests are read only now, so that the solution has no memory of them.
  workers.send(sock, json.dumps(started).encode())
  request = json.loads(workers.receive(sock))
  _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no ptrace, no /proc/<pid>/mem
  limit(spec, processes=None)
  drop_privileges(spec.get('uid'))

  def report(record: dict):
    workers.send(sock, json.dumps(record).encode())

  seconds = trial.judge(ours, solution, request['tests'], report)
  output = _tail(os.path.join(spec['scratch'], '.output'))
  report({'token': request['token'], 'seconds': seconds, 'output': output})
  os._exit(0)


def enter_namespaces() -> list[str]:
  """Leaves the machine's network and processes behind; what was granted."""
  flags = _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
  uid, gid = os.getuid(), os.getgid()
  if _LIBC.unshare(flags) == 0:
    return ['network', 'processes', 'files']
  if _LIBC.unshare(flags | _CLONE_NEWUSER) == 0:
    for name, text in (
      ('setgroups', 'deny'),
      ('uid_map', f'{uid} {uid} 1'),
      ('gid_map', f'{gid} {gid} 1'),
    ):
      with open(f'/proc/self/{name}', 'w') as file:
        file.write(text)
    return ['network', 'processes', 'files']
  return []


def enter_root(spec: dict):
  """Makes a root of read-only system and Python trees and a scratch directory.

  Nothing else of the machine's files is there, /proc and /etc/passwd included.
  """
  root, scratch = spec['root'], spec['scratch']
  # Only here: the supervisor keeps its view of /proc.
  if _LIBC.unshare(_CLONE_NEWNS) != 0:
    raise OSError(ctypes.get_errno(), 'unshare')
  _mount(None, '/', None, _MS_REC | _MS_PRIVATE)
  size = f'size={spec["scratch_bytes"]},mode=755'
  _mount('tmpfs', root, 'tmpfs', _MS_NOSUID | _MS_NODEV, size)
  for path in [*_SYSTEM, *_DEVICES, *spec['trees']]:
    if not os.path.lexists(path) or os.path.lexists(root + path):
      continue  # /usr/lib may be there already, as a part of /usr
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    if os.path.islink(path):
      os.symlink(os.readlink(path), root + path)
      continue
    if os.path.isdir(path):
      os.mkdir(root + path)
    else:
      os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY))
    _mount(path, root + path, None, _MS_BIND | _MS_REC)
    if path not in _DEVICES:
      _make_read_only(root + path)
  os.makedirs(root + scratch, exist_ok=True)
  os.chmod(root + scratch, 0o1777)
  os.makedirs(root + '/dev/shm', exist_ok=True)
  os.chmod(root + '/dev/shm', 0o1777)
  os.chdir(root)
  if _LIBC.pivot_root(b'.', b'.') != 0:
    raise OSError(ctypes.get_errno(), 'pivot_root')
  if _LIBC.umount2(b'.', _MNT_DETACH) != 0:
    raise OSError(ctypes.get_errno(), 'umount2')
  os.chdir('/')


def _mount(source, target, kind, flags, data=None):
  arguments = [
    part if part is None else part.encode() for part in (source, target, kind)
  ]
  data = data if data is None else data.encode()
  if _LIBC.mount(*arguments, ctypes.c_ulong(flags), data) != 0:
    raise OSError(ctypes.get_errno(), 'mount', target)


def _make_read_only(target: str):
  attributes = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
  record = struct.pack('QQQQ', attributes, 0, 0, 0)
  if (
    _LIBC.syscall(
      _SYS_MOUNT_SETATTR,
      _AT_FDCWD,
      target.encode(),
      _AT_RECURSIVE,
      record,
      ctypes.c_size_t(len(record)),
    )
    != 0
  ):
    raise OSError(ctypes.get_errno(), 'mount_setattr', target)


def start_solution(
  sock: socket.socket, spec: dict
) -> tuple[int, socket.socket]:
  """Forks the solution's process; returns its id and a socket to it."""
  ours, theirs = socket.socketpair()
  child = os.fork()
  if child:
    theirs.close()
    return child, ours
  try:
    sock.close()
    ours.close()
    os.setsid()
    output = os.path.join(spec['scratch'], '.output')
    for number, path, flags in (
      (0, '/dev/null', os.O_RDONLY),
      (1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
      (2, output, os.O_WRONLY | os.O_APPEND),
    ):
      os.dup2(os.open(path, flags, 0o644), number)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an OSError instead
    limit(spec, processes=spec['processes'])
    drop_privileges(spec.get('uid'))
    sys.stdout.reconfigure(line_buffering=True)
    workers.send(theirs, b'ready')
    solution = trial.Solution(spec['program'], spec['scratch'])
    exchange.Link(theirs, solution.operations()).serve()
  finally:
    os._exit(1)


def _anybody_reaches(path: str) -> bool:
  while path != '/':
    path = os.path.dirname(path)
    if not os.stat(path).st_mode & 0o001:
      return False
  return True


def _make_first_to_go():
  try:
    with open('/proc/self/oom_score_adj', 'w') as file:
      file.write('1000')
  except OSError:
    pass  # no /proc in this root


def limit(spec: dict, processes: int | None):
  """Sets resource limits, below those that are there already."""
  limits = {
    resource.RLIMIT_AS: spec['memory_bytes'],
    resource.RLIMIT_CPU: spec['cpu_s'],
    resource.RLIMIT_FSIZE: spec['file_bytes'],
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
  }
  if processes is not None:
    # Without a user of its own the run shares the count with its owner.
    others = 0 if os.getuid() == 0 else _count_threads(os.getuid())
    limits[resource.RLIMIT_NPROC] = processes + others
  for kind, value in limits.items():
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
      value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _count_threads(uid: int) -> int:
  total = 0
  for entry in os.listdir('/proc') if os.path.isdir('/proc') else ():
    try:
      if entry.isdigit() and os.stat(f'/proc/{entry}').st_uid == uid:
        total += len(os.listdir(f'/proc/{entry}/task'))
    except OSError:
      continue
  return total


def drop_privileges(uid: int | None):
  """Becomes an unprivileged user for good, without capabilities."""
  if uid is not None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
  _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  header = struct.pack('Ii', 0x20080522, 0)
  if _LIBC.capset(header, struct.pack('6I', 0, 0, 0, 0, 0, 0)) != 0:
    raise OSError(ctypes.get_errno(), 'capset')


def _tail(path: str, size: int = 2000) -> str:
  try:
    # It is the solution's file: it may be a link or a pipe by now.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags), 'rb') as file:
      file.seek(0, os.SEEK_END)
      file.seek(max(file.tell() - size, 0))
      return file.read(size).decode(errors='replace')
  except OSError:
    return ''


if __name__ == '__main__':
  main()
