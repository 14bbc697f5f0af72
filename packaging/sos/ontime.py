# Plugin for sos (https://github.com/sosreport/sos): copy it to sos/report/plugins of the installed sos, then
# `sos report -o ontime` or any report of this host has Ontime's state.
from sos.report.plugins import Plugin, RedHatPlugin, DebianPlugin, UbuntuPlugin


class Ontime(Plugin, RedHatPlugin, DebianPlugin, UbuntuPlugin):

    short_desc = 'Ontime: real-time latency of VMs and containers'
    plugin_name = 'ontime'
    profiles = ('system', 'virt', 'network')
    packages = ('ontime',)
    commands = ('ontime',)

    def setup(self):
        self.add_copy_spec([
            '/etc/ontime/*.toml',
            '/etc/ontime/*.conf.d/*.toml',
            '/var/lib/ontime/originals',
        ])
        self.add_cmd_output([
            'ontime --version',
            'ontime status --all',
            'ontime status --json',
            'ontime ps --json',
            'ontime net status --json',
            'ontime top --once --json --interval 0.5',
            'ontime apply --dry-run --json',
            'ontime doctor --all',
            'ontime doctor --all --json',
            'ontime check',
            'ontime metrics',
        ])
        self.add_journal(units=['ontimed', 'ontime-device@*'])
        self.add_service_status('ontimed')

    def postproc(self):
        self.do_path_regex_sub(
            r'/etc/ontime/.*\.toml',
            r'(?im)^(.*(?:password|passwd|passphrase|secret|token|private-key)[^=\n]*=).*$',
            r'\1 "left out"')
