//! `ontime attach`: prints what a VM's QEMU needs for outsourced sockets, as options or as libvirt XML. It changes
//! nothing, except with `--qmp`, which connects a running VM to a new device process.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use ontime_sockets::abi::{ONTIME_VIRTIO_ID, ONTIME_VQS_CHANNEL, ONTIME_VQS_MAIN, ontime_config};
use ontime_sockets::config;
use serde_json::Value;

use crate::device::vm_name;
use crate::exit;
use crate::paths::Paths;
use crate::replug::{self, Plug};

/// `ontime attach`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM: its table in sockets.toml says how many channels it has.
    #[arg(value_name = "DOMAIN", value_parser = vm_name)]
    vm: String,
    /// Print libvirt XML instead of QEMU's options.
    #[arg(long)]
    libvirt: bool,
    /// The guest's memory in MiB, for QEMU's options.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    memory: u32,
    /// In the running VM of this monitor (-qmp unix:SOCKET,server=on): replace the devices of a process that has gone.
    #[arg(long, value_name = "SOCKET", conflicts_with = "libvirt")]
    qmp: Option<PathBuf>,
    /// Print the commands for a running VM, one a line, for `virsh qemu-monitor-command DOMAIN`.
    #[arg(long, conflicts_with_all = ["libvirt", "qmp"])]
    replug: bool,
}

/// Entries of each virtqueue: the most that the device allows.
const QUEUE_SIZE: u32 = 256;

/// The chassis number of the first device's port, above the numbers that a VMM assigns by itself.
const CHASSIS: u32 = 100;

/// Prints the options, or replaces the devices.
///
/// # Errors
/// Where the configuration is wrong, standard output is closed, or QEMU refuses.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let Some(vm) = config::load(&paths.config_dir, &args.vm)? else {
        exit::usage!(
            "no VM {0} has outsourced sockets: there is no table [vm.{0}] in {1}/sockets.toml; write one, which says \
             what the VM may do, or correct the name",
            args.vm,
            paths.config_dir.display()
        );
    };
    let channels = vm.channels;
    let device_paths = ontime_sockets::Paths::new(&paths.run_dir, &args.vm);
    if args.replug || args.qmp.is_some() {
        let sockets: Vec<PathBuf> = (0..=channels).map(|channel| device_paths.device(channel)).collect();
        let plugs: Vec<Plug> = (0..=channels)
            .zip(&sockets)
            .map(|(channel, socket)| Plug { channel, socket, properties: properties(channel).into() })
            .collect();
        let commands = replug::commands(&plugs);
        if let Some(monitor) = &args.qmp {
            replug::run(monitor, &commands)?;
            return Ok(ExitCode::SUCCESS);
        }
        let lines: String = commands.iter().map(|command| format!("{}\n", command.json)).collect();
        std::io::stdout().lock().write_all(lines.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let devices: Vec<[String; 3]> = (0..=channels).map(|channel| device(&device_paths, channel)).collect();
    let text = if args.libvirt { libvirt(&devices) } else { qemu(&devices, args.memory) };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// A device's own properties.
fn properties(channel: u32) -> [(&'static str, u32); 4] {
    let queues = if channel == 0 { ONTIME_VQS_MAIN } else { ONTIME_VQS_CHANNEL };
    let config = size_of::<ontime_config>() as u32;
    [("virtio-id", ONTIME_VIRTIO_ID), ("num_vqs", queues), ("vq_size", QUEUE_SIZE), ("config_size", config)]
}

/// The values of `-chardev`, of `-device` for a port from which the device can be unplugged, and of `-device` for the
/// device.
fn device(paths: &ontime_sockets::Paths, channel: u32) -> [String; 3] {
    let path = paths.device(channel).display().to_string().replace(',', ",,");
    let properties: String = properties(channel).iter().map(|(name, value)| format!(",{name}={value}")).collect();
    [
        format!("socket,id=ontime{channel},path={path}"),
        format!("pcie-root-port,id=ontime-port{channel},chassis={}", CHASSIS + channel),
        format!(
            "vhost-user-test-device-pci,id=ontime-dev{channel},bus=ontime-port{channel},\
             chardev=ontime{channel}{properties}"
        ),
    ]
}

/// All options with their values.
fn options(devices: &[[String; 3]]) -> impl Iterator<Item = (&'static str, &String)> {
    devices.iter().flat_map(|[chardev, port, device]| [("-chardev", chardev), ("-device", port), ("-device", device)])
}

fn qemu(devices: &[[String; 3]], memory: u32) -> String {
    let mut lines = vec![
        format!("-object memory-backend-memfd,id=ontime-ram,size={memory}M,share=on"),
        "-machine memory-backend=ontime-ram".to_owned(),
    ];
    lines.extend(options(devices).map(|(option, value)| format!("{option} {value}")));
    lines.join(" \\\n") + "\n"
}

/// A device's value in JSON. libvirt describes its own devices so. QEMU makes all devices in the other form first, and
/// one without an address would take the slot that libvirt has given to one of its own.
fn json(device: &str) -> String {
    let words = device.split(',').map(|word| word.split_once('=').unwrap_or(("driver", word)));
    let typed = |value: &str| value.parse::<u32>().map_or_else(|_| value.into(), Value::from);
    Value::Object(words.map(|(name, value)| (name.to_owned(), typed(value))).collect()).to_string()
}

fn libvirt(devices: &[[String; 3]]) -> String {
    let mut text = "<!-- into <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'> -->\n\
                    <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\n<qemu:commandline>\n"
        .to_owned();
    for (option, value) in options(devices) {
        let value = if option == "-device" { json(value) } else { value.clone() };
        let value = value.replace('&', "&amp;").replace('\'', "&apos;").replace('<', "&lt;");
        text += &format!("  <qemu:arg value='{option}'/>\n  <qemu:arg value='{value}'/>\n");
    }
    text + "</qemu:commandline>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_channel_is_a_device_of_its_own() {
        let paths = ontime_sockets::Paths::new("/run/ontime".as_ref(), "web");
        let devices = [device(&paths, 0), device(&paths, 1)];
        let text = qemu(&devices, 512);
        assert!(text.contains("-chardev socket,id=ontime0,path=/run/ontime/device/web/main.sock"), "{text}");
        assert!(text.contains("chardev=ontime1,virtio-id=38,num_vqs=2,vq_size=256,config_size=64"), "{text}");
        let xml =
            format!("<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>{}</domain>", libvirt(&devices));
        let document = roxmltree::Document::parse(&xml).unwrap();
        let namespace = "http://libvirt.org/schemas/domain/qemu/1.0";
        let arguments: Vec<&str> = document
            .descendants()
            .filter(|node| node.has_tag_name((namespace, "arg")))
            .filter_map(|node| node.attribute("value"))
            .collect();
        assert_eq!(arguments.len(), 12);
        let made: Value = serde_json::from_str(arguments[11]).unwrap();
        let wanted = serde_json::json!({
            "driver": "vhost-user-test-device-pci", "id": "ontime-dev1", "bus": "ontime-port1", "chardev": "ontime1",
            "virtio-id": 38, "num_vqs": 2, "vq_size": 256, "config_size": 64,
        });
        assert_eq!(made, wanted);
    }
}
