//! The service in code instead of a `.proto` file, so that no `protoc` is needed.

use tonic_build::manual::{Builder, Method, Service};

fn main() {
    let methods = ["text", "give", "echo", "sleep"].map(|name| {
        Method::builder()
            .name(name)
            .route_name(name)
            .input_type("crate::Data")
            .output_type("crate::Data")
            .codec_path("tonic_prost::ProstCodec")
            .build()
    });
    let service = methods.into_iter().fold(Service::builder(), |service, method| service.method(method));
    Builder::new().compile(&[service.name("Bench").package("bench").build()]);
}
